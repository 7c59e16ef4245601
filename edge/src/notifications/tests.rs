use super::*;
use futures::FutureExt as _;
use futures::stream;
use std::sync::Mutex;
use tokio::sync::mpsc::UnboundedSender;

/// A bus that records its subscriptions.
#[derive(Default)]
struct Wire(Mutex<BTreeMap<String, Vec<UnboundedSender<Vec<u8>>>>>);

impl Wire {
    /// Publishes on the subject; returns the number of subscribed replicas.
    fn publish(&self, subject: &str, message: &str) -> usize {
        let mut subjects = self.0.lock().unwrap();
        let Some(listeners) = subjects.get_mut(subject) else { return 0 };
        listeners.retain(|listener| listener.send(message.as_bytes().to_vec()).is_ok());
        listeners.len()
    }
}

impl NotificationBus for Wire {
    fn listen(&self, subject: String) -> BoxFuture<'_, Option<BoxStream<'static, Vec<u8>>>> {
        async move {
            #[expect(clippy::disallowed_methods, reason = "a test sends a few messages")]
            let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
            self.0.lock().unwrap().entry(subject).or_default().push(sender);
            Some(stream::poll_fn(move |context| receiver.poll_recv(context)).boxed())
        }
        .boxed()
    }
}

fn hub() -> (Arc<Wire>, Notifications) {
    let wire = Arc::new(Wire::default());
    let bus = Arc::clone(&wire) as Arc<dyn NotificationBus>;
    (wire, Notifications::register(&Registry::new(), Some(bus)).unwrap())
}

fn user(id: &str) -> Channel {
    Channel::User(id.into())
}

fn org(id: &str) -> Channel {
    Channel::Org(id.into())
}

async fn received(listening: &mut Subscription) -> Vec<String> {
    let mut received = Vec::new();
    while let Ok(Some(message)) = tokio::time::timeout(Duration::from_millis(50), listening.messages.recv()).await {
        received.push(message.to_string());
    }
    received
}

#[tokio::test]
async fn subscribers_receive_exactly_the_messages_of_their_channels() {
    let (wire, hub) = hub();
    let mut ann = hub.listen(vec![user("ann"), org("acme"), Channel::Broadcast]).await;
    let mut ann_again = hub.listen(vec![user("ann"), Channel::Broadcast]).await;
    let mut bob = hub.listen(vec![user("bob"), org("other"), Channel::Broadcast]).await;
    // An organization named like a user, and a user named like the broadcast channel.
    let mut eve = hub.listen(vec![user("acme"), org("ann"), user(">")]).await;
    for (channel, message) in [
        (user("ann"), "to ann"),
        (user("bob"), "to bob"),
        (org("acme"), "to acme"),
        (Channel::Broadcast, "to all"),
        (user("nobody"), "to nobody"),
    ] {
        let replicas = wire.publish(&channel.subject(), message);
        assert_eq!(replicas, usize::from(message != "to nobody"), "one subscription a channel: {message}");
    }
    let mut of_ann = received(&mut ann).await;
    of_ann.sort_unstable();
    assert_eq!(of_ann, ["to acme", "to all", "to ann"]);
    let mut of_ann = received(&mut ann_again).await;
    of_ann.sort_unstable();
    assert_eq!(of_ann, ["to all", "to ann"]);
    let mut of_bob = received(&mut bob).await;
    of_bob.sort_unstable();
    assert_eq!(of_bob, ["to all", "to bob"]);
    assert!(received(&mut eve).await.is_empty());
}

#[tokio::test]
async fn slow_subscriber_is_disconnected_and_others_continue() {
    let (wire, hub) = hub();
    let slow = hub.listen(vec![user("ann")]).await;
    let mut quick = hub.listen(vec![user("ann")]).await;
    let mut taken = 0;
    for n in 0..3 * QUEUE {
        wire.publish(&user("ann").subject(), &n.to_string());
        taken += usize::from(quick.messages.recv().await.is_some());
    }
    assert_eq!(taken, 3 * QUEUE);
    assert!(slow.slow.is_cancelled() && !quick.slow.is_cancelled());
    assert_eq!(hub.metrics().write_errors.get(), 2 * QUEUE as u64);
}

#[tokio::test]
async fn bus_subscription_ends_with_the_last_subscriber_and_restarts_with_the_next() {
    let (wire, hub) = hub();
    let (first, second) = (hub.listen(vec![user("ann")]).await, hub.listen(vec![user("ann")]).await);
    drop(first);
    assert_eq!(wire.publish(&user("ann").subject(), "x"), 1);
    drop(second);
    assert!(hub.0.channels.is_empty());
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(wire.publish(&user("ann").subject(), "x"), 0, "nobody here listens any more");
    let mut repeated = hub.listen(vec![user("ann")]).await;
    assert_eq!(wire.publish(&user("ann").subject(), "y"), 1);
    assert_eq!(received(&mut repeated).await, ["y"]);
}

#[tokio::test]
async fn invalid_bus_message_reaches_no_subscriber() {
    let (wire, hub) = hub();
    let mut ann = hub.listen(vec![user("ann")]).await;
    let subject = user("ann").subject();
    wire.publish(&subject, &"x".repeat(MAX_MESSAGE + 1));
    for listener in wire.0.lock().unwrap().values().flatten() {
        listener.send(vec![0xff, 0xfe]).unwrap();
    }
    wire.publish(&subject, "good");
    assert_eq!(received(&mut ann).await, ["good"]);
}

#[tokio::test]
async fn subscriber_during_a_bus_outage_receives_messages_after_it() {
    #[derive(Default)]
    struct Away(std::sync::atomic::AtomicBool, Wire);
    impl NotificationBus for Away {
        fn listen(&self, subject: String) -> BoxFuture<'_, Option<BoxStream<'static, Vec<u8>>>> {
            if self.0.load(Ordering::Relaxed) { self.1.listen(subject) } else { async { None }.boxed() }
        }
    }
    let bus = Arc::new(Away::default());
    let hub = Notifications::register(&Registry::new(), Some(Arc::clone(&bus) as Arc<dyn NotificationBus>)).unwrap();
    let listening = tokio::spawn(async move { hub.listen(vec![user("ann")]).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(bus.1.publish(&user("ann").subject(), "lost"), 0);
    bus.0.store(true, Ordering::Relaxed);
    let mut ann = listening.await.unwrap();
    assert_eq!(bus.1.publish(&user("ann").subject(), "a message"), 1);
    assert_eq!(received(&mut ann).await, ["a message"]);
}
