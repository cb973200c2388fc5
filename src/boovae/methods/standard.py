"""`standard`: sequential fine-tuning without protection against forgetting.

The lower bound of every comparison: the network is trained on one task after another with the ELBO alone
(Kingma and Welling, 2014) and forgets the earlier ones.
"""

from boovae.methods.method import Method


class Standard(Method):
    """Sequential fine-tuning."""

    name = "standard"
    summary = "fine-tunes on each task without protection: the lower bound"
