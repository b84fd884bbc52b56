"""A training whose model is split over ranks."""
