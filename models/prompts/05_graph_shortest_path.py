"""Shortest paths in weighted graphs."""

import heapq
from collections import deque


def bfs_distances(graph, source):
    """Return the number of edges from source to every reachable node.

    Parameters
    ----------
    graph : dict
        Maps each node to an iterable of its neighbors.
    source : node
        Where to start.
    """
    distances = {source: 0}
    queue = deque([source])
    while queue:
        node = queue.popleft()
        for neighbor in graph[node]:
            if neighbor not in distances:
                distances[neighbor] = distances[node] + 1
                queue.append(neighbor)
    return distances


def dijkstra(graph, source, target=None):
    """Return the lengths of the shortest paths from source, and the predecessors.

    Parameters
    ----------
    graph : dict
        Maps each node to a dict of neighbors and positive edge weights.
    source : node
        Where to start.
    target : node, optional
        Stop as soon as the path to this node is known.
    """
    distances = {}
    predecessors = {source: None}
    queue = [(0, source)]
    while queue: