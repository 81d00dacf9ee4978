"""Datasets for training and testing; a name is imported when it is first used."""
