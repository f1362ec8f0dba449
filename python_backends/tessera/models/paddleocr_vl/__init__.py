"""PaddleOCR-VL: reads cut-out elements of documents, by a prompt for each kind."""
