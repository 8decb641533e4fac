"""Decoders: their configs, RoPE, parameters, the forward pass, and loading them from files."""
