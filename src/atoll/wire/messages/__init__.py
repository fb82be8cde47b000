"""The one vocabulary: one file per conversation, every message a frozen tagged msgspec struct."""
