"""The processes that train together: what they exchange, and on what they must agree."""
