"""The parts that the text models are built of."""
