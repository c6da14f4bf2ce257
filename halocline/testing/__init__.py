"""Tools to test code that runs on several ranks."""
