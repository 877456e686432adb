"""What happens inside one step: accumulation and clipping."""
