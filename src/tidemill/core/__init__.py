"""Ground floor: errors, schemas, configurations, memory. Knows nothing of reinforcement
learning."""
