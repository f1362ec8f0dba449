"""Vision towers behind one contract, :class:`tessera.vision.towers.tower.Tower`; one file each."""
