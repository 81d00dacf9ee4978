"""Losses: the metric losses of the papers, and losses around other losses."""
