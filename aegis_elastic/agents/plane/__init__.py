"""plane."""
