"""Archive of older states as erasure-coded pieces on several members."""
