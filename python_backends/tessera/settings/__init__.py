"""What may be set, where, and what is taken otherwise; which device there is and who gets how much of it."""
