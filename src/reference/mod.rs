//! Plain forward passes that share nothing with the graph.
