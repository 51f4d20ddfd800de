"""The room that imports ray: actors, slots, submission."""
