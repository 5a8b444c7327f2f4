"""The memory that both ends share: its layouts, its files, and who may write when."""
