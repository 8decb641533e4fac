"""Evaluation: samples, metrics, and the studies that use them."""
