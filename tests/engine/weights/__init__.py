"""Folders that people bring: broken, foreign, or to be read otherwise than they say."""
