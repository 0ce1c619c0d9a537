"""The report: makes a leaderboard and charts of the records, on a static page that opens from disk."""
