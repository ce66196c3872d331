"""Contestants of `contratile bench`, by what they contest."""
