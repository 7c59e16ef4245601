//! A read that the requests of this replica share for a few seconds.

use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// How long a failure is shared: the requests that waited for it do not repeat it one after the other.
const FAILURE_TTL: Duration = Duration::from_secs(1);

/// The last result of a read. Concurrent requests wait for the same read, so the source is read at most once in the lifetime of a result,
/// by one request at a time. Clones share the result.
pub(super) struct CachedRead<T, E> {
    ttl: Duration,
    last: Arc<Mutex<Option<StampedResult<T, E>>>>,
}

/// A result, and when it was read.
type StampedResult<T, E> = (Instant, Result<T, Arc<E>>);

impl<T, E> Clone for CachedRead<T, E> {
    fn clone(&self) -> Self {
        Self { ttl: self.ttl, last: Arc::clone(&self.last) }
    }
}

impl<T: Clone, E> CachedRead<T, E> {
    /// A value is shared for `ttl`, a failure for at most a second.
    pub(super) fn with_ttl(ttl: Duration) -> Self {
        Self { ttl, last: Arc::default() }
    }

    /// The value of at most this age, from the cache or from `read`.
    ///
    /// # Errors
    /// That of `read`.
    pub(super) async fn get(&self, read: impl Future<Output = Result<T, E>>) -> Result<T, Arc<E>> {
        let mut last = self.last.lock().await;
        if let Some((read_at, result)) = &*last
            && read_at.elapsed() < self.ttl_of(result)
        {
            return result.clone();
        }
        let result = read.await.map_err(Arc::new);
        *last = Some((Instant::now(), result.clone()));
        result
    }

    fn ttl_of(&self, result: &Result<T, Arc<E>>) -> Duration {
        match result {
            Ok(_) => self.ttl,
            Err(_) => self.ttl.min(FAILURE_TTL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::future::join_all;
    use std::sync::atomic::{AtomicU32, Ordering};

    const TTL: Duration = Duration::from_secs(5);

    /// A source that takes two seconds, and the number of its reads.
    #[derive(Default)]
    struct Source(AtomicU32);

    impl Source {
        async fn read(&self, works: bool) -> Result<u32, &'static str> {
            let number = self.0.fetch_add(1, Ordering::Relaxed) + 1;
            tokio::time::sleep(Duration::from_secs(2)).await;
            if works { Ok(number) } else { Err("it does not answer") }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_requests_share_one_read_until_its_lifetime_ends() {
        let (source, cache) = (Source::default(), CachedRead::with_ttl(TTL));
        let shared = join_all((0..20).map(|_| cache.get(source.read(true)))).await;
        assert!(shared.iter().all(|value| *value == Ok(1)), "{shared:?}");
        tokio::time::advance(TTL - Duration::from_millis(1)).await;
        assert_eq!(cache.get(source.read(true)).await, Ok(1));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(cache.get(source.read(true)).await, Ok(2));
    }

    #[tokio::test(start_paused = true)]
    async fn requests_that_waited_for_a_failure_share_it_and_a_later_one_reads_again() {
        let (source, cache) = (Source::default(), CachedRead::with_ttl(TTL));
        let shared = join_all((0..20).map(|_| cache.get(source.read(false)))).await;
        assert!(shared.iter().all(|value| value.as_ref().is_err_and(|error| **error == "it does not answer")));
        assert_eq!(source.0.load(Ordering::Relaxed), 1);
        tokio::time::advance(FAILURE_TTL).await;
        assert_eq!(cache.get(source.read(true)).await, Ok(2));
    }

    #[tokio::test(start_paused = true)]
    async fn request_whose_client_left_leaves_the_read_to_the_next_one() {
        let (source, cache) = (Source::default(), CachedRead::with_ttl(TTL));
        let abandoned = tokio::time::timeout(Duration::from_secs(1), cache.get(source.read(true))).await;
        assert!(abandoned.is_err());
        assert_eq!(cache.get(source.read(true)).await, Ok(2));
    }
}
