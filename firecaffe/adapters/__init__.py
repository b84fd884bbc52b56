"""Adapters by which other libraries' trainers use firecaffe's exchange."""
