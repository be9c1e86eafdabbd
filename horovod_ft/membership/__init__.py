"""Who is in the group, and how a broken group is formed anew. One way a file, all behind ``base.Membership``."""
