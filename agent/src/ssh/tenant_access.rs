//! Tenants' logins by an sshd of the agent's own, whatever becomes of the sshd: it is prepared and started again until it runs. An agent whose
//! machine has none, or one that does not start, does everything else.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{END_TIMEOUT, PamService, SshError, Sshd};
use crate::atomic_file;
use crate::chain;
use crate::full_jitter::Backoff;
use crate::repeated_failures::RepeatedFailures;

const BACKOFF_BASE: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(30);

type Prepare = dyn Fn() -> Result<Sshd, SshError> + Send + Sync;

/// See the module's documentation.
pub struct TenantAccess {
    prepare: Arc<Prepare>,
    /// The file of its PAM service.
    service: PathBuf,
    /// At the agent's start; `None` where that failed.
    prepared: Mutex<Option<Sshd>>,
    unavailable: Mutex<Option<String>>,
    unlogged: RepeatedFailures<()>,
    /// Whether it is logged that the machine's PAM has no namespaces.
    is_pam_logged: AtomicBool,
}

impl TenantAccess {
    /// Prepares the sshd. Where that fails, [`Self::run`] tries it again.
    #[must_use]
    pub fn open(state_dir: &Path, keys: &Path, listen: SocketAddr) -> Self {
        let service = PamService::path(&PamService::name(state_dir));
        let (state_dir, keys) = (state_dir.to_owned(), keys.to_owned());
        Self::prepared_by(service, Arc::new(move || Sshd::prepare(&state_dir, &keys, listen)))
    }

    fn prepared_by(service: PathBuf, prepare: Arc<Prepare>) -> Self {
        let (prepared, unavailable) = (Mutex::default(), Mutex::default());
        let (unlogged, is_pam_logged) = (RepeatedFailures::default(), AtomicBool::new(false));
        let this = Self { prepare, service, prepared, unavailable, unlogged, is_pam_logged };
        match (this.prepare)() {
            Ok(sshd) => {
                this.note_prepared(&sshd);
                *locked(&this.prepared) = Some(sshd);
            }
            Err(error) => this.note(&chain(&error)),
        }
        this
    }

    /// Why tenants cannot log in by SSH; `None` while they can, and while the sshd is started for the first time.
    #[must_use]
    pub fn unavailable(&self) -> Option<String> {
        locked(&self.unavailable).clone()
    }

    /// Keeps sshd running until `stop` is cancelled.
    pub async fn run(&self, stop: &CancellationToken) {
        let mut backoff = Backoff::new(BACKOFF_BASE, BACKOFF_MAX);
        while !stop.is_cancelled() {
            let begun = Instant::now();
            let Some(why) = self.serve(stop).await else { break };
            self.note(&why);
            if begun.elapsed() > BACKOFF_MAX {
                backoff.reset();
            }
            tokio::select! {
                () = tokio::time::sleep(backoff.next(rand::random(), None)) => {}
                () = stop.cancelled() => {}
            }
        }
        let _ = atomic_file::remove(&self.service);
    }

    /// Prepares and runs it once. Returns why it does not run; `None` where `stop` is cancelled.
    async fn serve(&self, stop: &CancellationToken) -> Option<String> {
        let prepared = locked(&self.prepared).take();
        let sshd = match prepared {
            Some(sshd) => sshd,
            None => {
                let (prepare, service, stopped) = (Arc::clone(&self.prepare), self.service.clone(), stop.clone());
                let mut preparing = tokio::task::spawn_blocking(move || {
                    let prepared = prepare();
                    // It may have been written after its removal.
                    if stopped.is_cancelled() {
                        let _ = atomic_file::remove(&service);
                    }
                    prepared
                });
                let prepared = tokio::select! {
                    prepared = &mut preparing => prepared,
                    () = stop.cancelled() => {
                        // The end of the process would end it between the two.
                        let _ = tokio::time::timeout(END_TIMEOUT, preparing).await;
                        return None;
                    }
                };
                match prepared {
                    Ok(Ok(sshd)) => {
                        self.note_prepared(&sshd);
                        sshd
                    }
                    Ok(Err(error)) => return Some(chain(&error)),
                    Err(error) => return Some(error.to_string()),
                }
            }
        };
        let on_listening = || {
            *locked(&self.unavailable) = None;
            self.unlogged.retain(|()| false);
        };
        sshd.serve(stop, on_listening).await
    }

    fn note_prepared(&self, sshd: &Sshd) {
        if self.is_pam_to_be_logged(sshd) {
            warn!(
                error_code = "pam_namespace_missing",
                "logins by SSH see the machine's /tmp and everybody's processes; install pam_namespace"
            );
        }
    }

    /// Once, however often the sshd is started.
    fn is_pam_to_be_logged(&self, sshd: &Sshd) -> bool {
        sshd.service.is_none() && !self.is_pam_logged.swap(true, Ordering::Relaxed)
    }

    fn note(&self, why: &str) {
        if self.unlogged.is_to_be_logged((), why) {
            warn!(error_code = "ssh", error = why, "tenants cannot log in by SSH; trying again");
        }
        *locked(&self.unavailable) = Some(why.to_owned());
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    /// Its sshd is this script; without the file there is none.
    fn access(folder: &Path) -> TenantAccess {
        let (program, folder) = (folder.join("sshd"), folder.to_owned());
        let service = folder.join("pam-service");
        let prepare = move || match program.exists() {
            true => Ok(Sshd { program: program.clone(), folder: folder.clone(), service: None }),
            false => Err(SshError::NoProgram),
        };
        TenantAccess::prepared_by(service, Arc::new(prepare))
    }

    async fn eventually(mut holds: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !holds() {
            assert!(begun.elapsed() < Duration::from_secs(120), "it has not come about");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn install(folder: &Path, script: &str) {
        let script = format!("#!/bin/sh\n{script}\n");
        atomic_file::write_atomically(&folder.join("sshd"), script.as_bytes(), 0o700).unwrap();
    }

    #[tokio::test]
    async fn machine_without_a_usable_sshd_says_why_and_admits_tenants_once_it_has_one() {
        let folder = tempfile::tempdir().unwrap();
        let (access, stop) = (access(folder.path()), CancellationToken::new());
        assert!(access.unavailable().unwrap().contains("install openssh-server"));
        let says = |text: &str| access.unavailable().is_some_and(|why| why.contains(text));
        let happenings = async {
            // It ends only after a while, and has never listened.
            install(folder.path(), "sleep 2; echo 'Bind to port 2222 failed: Address already in use.' >&2; exit 255");
            let is_bound_by_another = || says("exit status: 255: Bind to port 2222 failed");
            eventually(is_bound_by_another).await;
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_secs(5) {
                assert!(is_bound_by_another(), "{:?}", access.unavailable());
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            // It ends once this file is gone.
            std::fs::write(folder.path().join("runs"), "").unwrap();
            install(
                folder.path(),
                &format!(
                    "echo 'Server listening on 127.0.0.1 port 2222.' >&2; while [ -e '{}' ]; do sleep 0.05; done",
                    folder.path().join("runs").display()
                ),
            );
            eventually(|| access.unavailable().is_none()).await;
            std::fs::remove_file(folder.path().join("runs")).unwrap();
            eventually(|| says("exit status: 0: Server listening")).await;
            std::fs::remove_file(folder.path().join("sshd")).unwrap();
            eventually(|| says("install openssh-server")).await;
            stop.cancel();
        };
        tokio::join!(access.run(&stop), happenings);
    }

    #[tokio::test]
    async fn stop_while_it_is_prepared_leaves_no_pam_service() {
        let folder = tempfile::tempdir().unwrap();
        let (service, stop) = (folder.path().join("pam-service"), CancellationToken::new());
        let (attempts, is_released) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let prepare = {
            let (service, attempts, is_released) = (service.clone(), Arc::clone(&attempts), Arc::clone(&is_released));
            move || {
                // The second attempt is that of `run`.
                if attempts.fetch_add(1, Ordering::SeqCst) > 0 {
                    while !is_released.load(Ordering::SeqCst) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    std::fs::write(&service, "").unwrap();
                }
                Err::<Sshd, _>(SshError::NoProgram)
            }
        };
        let access = TenantAccess::prepared_by(service.clone(), Arc::new(prepare));
        let happenings = async {
            eventually(|| attempts.load(Ordering::SeqCst) > 1).await;
            stop.cancel();
            tokio::time::sleep(Duration::from_millis(100)).await;
            is_released.store(true, Ordering::SeqCst);
        };
        tokio::join!(access.run(&stop), happenings);
        assert!(!service.exists());
    }

    #[test]
    fn pam_without_namespaces_is_logged_once() {
        let folder = tempfile::tempdir().unwrap();
        let access = access(folder.path());
        let sshd = Sshd { program: folder.path().join("sshd"), folder: folder.path().to_owned(), service: None };
        assert_eq!([(); 3].map(|()| access.is_pam_to_be_logged(&sshd)), [true, false, false]);
        let with_service = Sshd { service: Some(PamService { name: "s".to_owned() }), ..sshd };
        assert!(!access.is_pam_to_be_logged(&with_service));
    }
}
