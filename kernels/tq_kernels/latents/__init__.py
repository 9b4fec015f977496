"""Attention over packed latents (multi-head latent attention), with queries that have absorbed the up-projection."""
