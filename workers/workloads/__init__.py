"""Workloads that ship with the project: real data that every machine has. No Ray here."""
