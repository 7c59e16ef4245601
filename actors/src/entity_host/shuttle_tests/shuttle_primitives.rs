//! The primitives of the hand-over, scheduled by shuttle.

use shuttle::sync::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::ops::Deref;

pub(super) use shuttle::sync::Arc;
pub(super) use shuttle::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The part of `DashMap` that the hand-over uses, under one lock.
pub(super) struct Map<K, V>(Mutex<BTreeMap<K, V>>);

type Guard<'a, K, V> = MutexGuard<'a, BTreeMap<K, V>>;

pub(super) struct Ref<'a, K, V>(Guard<'a, K, V>, K);

impl<K: Ord, V> Deref for Ref<'_, K, V> {
    type Target = V;

    fn deref(&self) -> &V {
        &self.0[&self.1]
    }
}

pub(super) enum Entry<'a, K, V> {
    Occupied(Ref<'a, K, V>),
    Vacant(VacantEntry<'a, K, V>),
}

impl<K: Ord, V> Ref<'_, K, V> {
    pub(super) fn get(&self) -> &V {
        self
    }
}

pub(super) struct VacantEntry<'a, K, V>(Guard<'a, K, V>, K);

impl<K: Ord, V> VacantEntry<'_, K, V> {
    pub(super) fn insert(mut self, value: V) {
        self.0.insert(self.1, value);
    }
}

impl<K: Ord + Clone, V> Map<K, V> {
    pub(super) fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    pub(super) fn get(&self, key: &K) -> Option<Ref<'_, K, V>> {
        let map = self.0.lock().unwrap();
        if map.contains_key(key) { Some(Ref(map, key.clone())) } else { None }
    }

    pub(super) fn insert(&self, key: K, value: V) -> Option<V> {
        self.0.lock().unwrap().insert(key, value)
    }

    pub(super) fn remove(&self, key: &K) -> Option<(K, V)> {
        self.0.lock().unwrap().remove_entry(key)
    }

    pub(super) fn remove_if(&self, key: &K, is_one: impl FnOnce(&K, &V) -> bool) -> Option<(K, V)> {
        let mut map = self.0.lock().unwrap();
        if map.get(key).is_some_and(|value| is_one(key, value)) { map.remove_entry(key) } else { None }
    }

    /// `DashMap` locks its parts one after the other: what is added meanwhile may be missed.
    pub(super) fn retain(&self, mut stays: impl FnMut(&K, &mut V) -> bool) {
        let keys: Vec<K> = self.0.lock().unwrap().keys().cloned().collect();
        for key in keys {
            let mut map = self.0.lock().unwrap();
            if map.get_mut(&key).is_some_and(|value| !stays(&key, value)) {
                map.remove(&key);
            }
        }
    }

    pub(super) fn entry(&self, key: K) -> Entry<'_, K, V> {
        let map = self.0.lock().unwrap();
        if map.contains_key(&key) { Entry::Occupied(Ref(map, key)) } else { Entry::Vacant(VacantEntry(map, key)) }
    }
}
