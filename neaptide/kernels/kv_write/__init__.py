"""Keys and values into the cache by block table and direction, queries and keys rotated on the way. Only ``kernel`` and
``launch`` import Triton."""
