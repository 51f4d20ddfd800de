"""Steps and evaluations as members say them, until they are on record."""
