"""Copy a packed adapter's values into slot buffers."""
