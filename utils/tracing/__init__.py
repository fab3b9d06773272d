"""Traces told to people and programs: files found and read, one JSON document, text, tables, and what differs."""
