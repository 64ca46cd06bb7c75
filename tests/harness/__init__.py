"""Whole runs in processes of their own, cheap enough to be killed by the dozen."""
