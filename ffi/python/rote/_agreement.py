AGREED: dict[str, dict[str, int]] = {}
