"""One peer assembled from rooms, and the story of a round."""
