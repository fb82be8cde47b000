"""Message types: one file per protocol, each message a frozen tagged msgspec struct."""
