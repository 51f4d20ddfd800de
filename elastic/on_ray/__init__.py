"""The only room that imports ray: actors, slots, submission."""
