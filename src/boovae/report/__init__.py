"""Pictures, tables and a self-contained page from records of runs, which `runs` reads from their folders.

Plotly, matplotlib, Pillow and Jinja are imported only when they are needed, so a training machine can do without them.
"""
