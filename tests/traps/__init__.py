"""Small models that are easily got wrong, by what is easily missed about them."""
