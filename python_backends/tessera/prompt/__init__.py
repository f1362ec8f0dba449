"""What a request says: messages, templates, token ids, sampling parameters, grammars."""
