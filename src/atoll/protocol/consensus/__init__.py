"""Agreement on what a round produced. `agreement.py` is the narrow door; engines stand behind it."""
