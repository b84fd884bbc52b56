"""Trainers of others, whose gradients go through our exchange."""
