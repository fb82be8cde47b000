"""One peer of a run: its round machine, membership, governance and sync, assembled in `peer.py`."""
