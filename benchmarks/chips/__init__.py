"""The steps of `chip.py`: one process and one row of chips.json each."""
