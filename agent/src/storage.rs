//! The space of the machine's own disks. Each file system is asked by a reading of its own: one that does not answer keeps no other from
//! being counted.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use futures::future::join_all;
use nix::sys::statvfs::statvfs;

use crate::bounded_reading::BoundedReading;
use crate::system_executor::mounts::{self, LocalDisk};

/// Bytes of all disks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Space {
    pub total: u64,
    pub available: u64,
}

/// The machine's disks.
#[derive(Debug)]
pub struct Storage {
    table: BoundedReading<io::Result<Vec<LocalDisk>>>,
    disks: BTreeMap<PathBuf, Disk>,
}

#[derive(Debug)]
struct Disk {
    pool: String,
    /// `None`: it has no space to count, as a file system that fails.
    reading: BoundedReading<Option<Space>>,
    /// As it last answered.
    space: Option<Space>,
}

impl Default for Storage {
    fn default() -> Self {
        Self { table: BoundedReading::of("the table of mounts"), disks: BTreeMap::new() }
    }
}

impl Storage {
    /// The space of all disks; a disk that does not answer counts as it did before. `None`: nothing is known of any.
    pub async fn read(&mut self) -> Option<Space> {
        if let Some(Ok(found)) = self.table.read(mounts::local_disks).await.fresh() {
            self.note(found);
        }
        let readings = self.disks.iter_mut().map(|(point, disk)| async move {
            let asked = point.clone();
            if let Some(space) = disk.reading.read(move || space_at(&asked)).await.fresh() {
                disk.space = space;
            }
        });
        join_all(readings).await;
        self.space()
    }

    /// What does not answer.
    pub fn late(&self) -> impl Iterator<Item = &str> {
        let of_table = self.table.late_since().map(|_| self.table.subject());
        let of_disks = self.disks.values().filter(|disk| disk.reading.late_since().is_some());
        of_table.into_iter().chain(of_disks.map(|disk| disk.reading.subject()))
    }

    /// A disk that does not answer is forgotten only once it has answered: no second thread begins to ask it.
    fn note(&mut self, found: Vec<LocalDisk>) {
        self.disks.retain(|point, disk| {
            disk.reading.is_in_flight() || found.iter().any(|it| it.point == *point && it.pool == disk.pool)
        });
        for LocalDisk { pool, point } in found {
            let reading = || BoundedReading::of(point.display().to_string());
            self.disks.entry(point.clone()).or_insert_with(|| Disk { pool, reading: reading(), space: None });
        }
    }

    /// Of a pool, every file system shows what all of them have available, and what it uses itself.
    fn space(&self) -> Option<Space> {
        let mut pools: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        for (pool, space) in self.disks.values().filter_map(|disk| Some((disk.pool.as_str(), disk.space?))) {
            let (used, available) = pools.entry(pool).or_default();
            *used = used.saturating_add(space.total.saturating_sub(space.available));
            *available = space.available.max(*available);
        }
        let sum = |sum: Space, (used, available): &(u64, u64)| Space {
            total: sum.total.saturating_add(*used).saturating_add(*available),
            available: sum.available.saturating_add(*available),
        };
        (!pools.is_empty()).then(|| pools.values().fold(Space::default(), sum))
    }
}

fn space_at(point: &Path) -> Option<Space> {
    let found = statvfs(point).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.fragment_size());
    Some(Space { total: bytes(found.blocks()), available: bytes(found.blocks_available()) })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn disk(pool: &str, point: &str) -> LocalDisk {
        LocalDisk { pool: pool.into(), point: point.into() }
    }

    fn set(storage: &mut Storage, point: &str, total: u64, available: u64) {
        storage.disks.get_mut(&PathBuf::from(point)).unwrap().space = Some(Space { total, available });
    }

    #[tokio::test]
    async fn this_machine_has_storage() {
        let space = Storage::default().read().await.unwrap();
        assert!(space.total > 0 && space.available <= space.total, "{space:?}");
    }

    #[test]
    fn file_systems_of_a_pool_share_what_is_available() {
        let mut storage = Storage::default();
        storage.note(vec![disk("8:1", "/"), disk("tank", "/tank"), disk("tank", "/tank/b")]);
        assert_eq!(storage.space(), None, "nothing has answered");
        set(&mut storage, "/", 100, 40);
        set(&mut storage, "/tank", 1000, 1000);
        set(&mut storage, "/tank/b", 1500, 1000);
        assert_eq!(storage.space(), Some(Space { total: 1600, available: 1040 }));
    }

    #[tokio::test]
    async fn disk_that_hangs_counts_as_before_and_is_asked_by_one_thread_while_it_is_mounted_or_not() {
        let mut storage = Storage::default();
        storage.note(vec![disk("8:1", "/one"), disk("8:2", "/two")]);
        set(&mut storage, "/one", 100, 40);
        set(&mut storage, "/two", 10, 4);
        let (answer, hanging) = mpsc::channel::<()>();
        let two = &mut storage.disks.get_mut(&PathBuf::from("/two")).unwrap().reading;
        two.read(move || hanging.recv().ok().map(|()| Space::default())).await;
        storage.note(vec![disk("8:1", "/one")]);
        assert_eq!(storage.space(), Some(Space { total: 110, available: 44 }));
        drop(answer);
        while storage.disks.contains_key(&PathBuf::from("/two")) {
            tokio::task::yield_now().await;
            let two = &mut storage.disks.get_mut(&PathBuf::from("/two")).unwrap().reading;
            if two.read(|| panic!("a second thread")).await.fresh().is_some() {
                storage.note(vec![disk("8:1", "/one")]);
            }
        }
        assert_eq!(storage.space(), Some(Space { total: 100, available: 40 }));
    }
}
