"""`boovae serve`: a small local page to play with a trained model."""
