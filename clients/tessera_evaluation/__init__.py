"""What judges a served model: questions with known answers, recall, the choice of a tile policy. Stands on the SDK."""
