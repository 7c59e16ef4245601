use super::*;
use prost::Message;
use serde_json::json;

/// The messages of Loki's `push.proto`, as a client encodes them.
#[derive(Clone, PartialEq, Message)]
struct PushRequest {
    #[prost(message, repeated, tag = "1")]
    streams: Vec<StreamMessage>,
}

#[derive(Clone, PartialEq, Message)]
struct StreamMessage {
    #[prost(string, tag = "1")]
    labels: String,
    #[prost(message, repeated, tag = "2")]
    entries: Vec<EntryMessage>,
    #[prost(uint64, tag = "3")]
    hash: u64,
}

#[derive(Clone, PartialEq, Message)]
struct EntryMessage {
    #[prost(message, optional, tag = "1")]
    timestamp: Option<TimestampMessage>,
    #[prost(string, tag = "2")]
    line: String,
}

#[derive(Clone, PartialEq, Message)]
struct TimestampMessage {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

fn entry(line: &str) -> EntryMessage {
    EntryMessage { timestamp: Some(TimestampMessage { seconds: 1_700_000_000, nanos: 5 }), line: line.to_owned() }
}

fn compressed(request: &PushRequest) -> Vec<u8> {
    snap::raw::Encoder::new().compress_vec(&request.encode_to_vec()).unwrap()
}

fn read_streams(streams: Vec<StreamMessage>) -> Result<PushSummary, ApiError> {
    read(PushFormat::SnappyProtobuf, &compressed(&PushRequest { streams }))
}

fn read_value(batch: &serde_json::Value) -> Result<PushSummary, ApiError> {
    read(PushFormat::Json, batch.to_string().as_bytes())
}

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn both_formats_of_one_batch_have_the_same_summary() {
    let wanted = PushSummary { streams: vec![labels(&[("a", "x \"y\" \\ \n"), ("b", "ü")])], entries: 2 };
    let stream = StreamMessage {
        labels: r#"{a="x \"y\" \\ \n", b="\u00fc"}"#.to_owned(),
        entries: vec![entry("one"), entry("two")],
        hash: 7,
    };
    assert_eq!(read_streams(vec![stream]).unwrap(), wanted);
    let batch = json!({"streams": [{
        "stream": {"a": "x \"y\" \\ \n", "b": "ü"},
        "values": [["1700000000000000005", "one"], ["1700000000000000005", "two", {"trace_id": "1"}]],
    }]});
    assert_eq!(read_value(&batch).unwrap(), wanted);
}

#[test]
fn labels_that_cannot_be_read_are_refused() {
    for text in [
        "",
        "{",
        "}",
        "a=\"b\"",
        "{a}",
        "{a=b}",
        "{a=\"b}",
        "{a=\"b\" c=\"d\"}",
        "{a=\"b\"} x",
        "{a=\"\\q\"}",
        "{a=\"\\u12\"}",
        "{a=\"b\",a=\"c\"}",
    ] {
        let stream = StreamMessage { labels: text.to_owned(), entries: vec![entry("line")], hash: 0 };
        assert_eq!(read_streams(vec![stream]).unwrap_err().code(), Code::InvalidRequest, "{text}");
    }
}

#[test]
fn json_that_is_no_batch_is_refused() {
    for batch in [
        json!([]),
        json!({}),
        json!({"streams": {}}),
        json!({"streams": [], "more": 1}),
        json!({"streams": [{"stream": {}}]}),
        json!({"streams": [{"values": []}]}),
        json!({"streams": [{"stream": {"a": 1}, "values": []}]}),
        json!({"streams": [{"stream": {}, "values": [["1"]]}]}),
        json!({"streams": [{"stream": {}, "values": [[1, "line"]]}]}),
        json!({"streams": [{"stream": {}, "values": [["yesterday", "line"]]}]}),
        json!({"streams": [{"stream": {}, "values": [["1", "line", {}, 4]]}]}),
    ] {
        assert_eq!(read_value(&batch).unwrap_err().code(), Code::InvalidRequest, "{batch}");
    }
}

#[test]
fn declared_length_over_the_bound_is_refused_before_memory_is_allocated() {
    // A varint of 4 GiB less one byte, and a kilobyte of nothing.
    let mut body = vec![0xff, 0xff, 0xff, 0xff, 0x0f];
    body.extend([0; 1024]);
    let error = read(PushFormat::SnappyProtobuf, &body).unwrap_err();
    assert_eq!(error.code(), Code::PayloadTooLarge);
    assert_eq!(error.details()["limit_bytes"], DECODED_BYTES);
}

#[test]
fn batch_over_a_bound_is_refused_with_the_bound() {
    let batch = |streams: usize, labels: usize, entries: usize, line: usize| {
        let labels: serde_json::Map<_, _> = (0..labels).map(|n| (format!("label_{n}"), "v".into())).collect();
        let values = vec![json!(["1", "x".repeat(line)]); entries];
        json!({"streams": vec![json!({"stream": labels, "values": values}); streams]})
    };
    read_value(&batch(2, 15, 2, 100)).unwrap();
    for (over, named) in [
        (batch(STREAMS + 1, 1, 1, 1), "1000 streams"),
        (batch(1, 10_000, 1, 1), "64 labels"),
        (batch(1, 1, ENTRIES + 1, 1), "100000 entries"),
        (batch(1, 1, 1, LINE_BYTES + 1), "262144"),
    ] {
        let error = read_value(&over).unwrap_err();
        assert!(error.message().contains(named), "{}", error.message());
    }
    let many = vec![EntryMessage::default(); ENTRIES + 1];
    let stream = StreamMessage { labels: "{}".to_owned(), entries: many, hash: 0 };
    assert!(read_streams(vec![stream]).unwrap_err().message().contains("100000 entries"));
}

#[test]
fn truncated_protobuf_is_refused() {
    let whole = PushRequest {
        streams: vec![StreamMessage { labels: "{a=\"b\"}".into(), entries: vec![entry("line")], hash: 1 }],
    };
    let bytes = whole.encode_to_vec();
    for length in 1..bytes.len() {
        let cut = snap::raw::Encoder::new().compress_vec(&bytes[..length]).unwrap();
        assert!(read(PushFormat::SnappyProtobuf, &cut).is_err(), "{length} of {} bytes", bytes.len());
    }
}
