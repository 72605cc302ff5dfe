"""Programs that share a card in pairs, by the card's own means and by ours: `python -m nvshare.bench.pairs`."""
