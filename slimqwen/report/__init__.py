"""The report: records -> leaderboard and charts -> a static site that opens from disk."""
