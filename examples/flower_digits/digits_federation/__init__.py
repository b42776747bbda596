"""A federation on Flower: clients share images, the server tests the model."""
