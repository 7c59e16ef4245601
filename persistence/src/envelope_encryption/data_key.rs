//! A data key for a value that is sealed in many parts. It is sealed itself as any other value, so that a rotation of the key ring
//! rewraps one value and not all of the parts.

use super::{EnvelopeError, KEY, KeyRing, SealContext, decrypt, encrypt};
use aes_gcm::aead::Generate as _;
use secrecy::{ExposeSecret as _, SecretSlice};
use std::fmt;
use zeroize::Zeroizing;

const PART: u8 = b'p';

/// See the module. Each part is sealed under a random nonce, so at most 2^32 of them.
pub struct DataKey(Zeroizing<[u8; KEY]>);

impl fmt::Debug for DataKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DataKey(..)")
    }
}

impl KeyRing {
    /// A new key, and its sealed form, to be stored at `context`.
    ///
    /// # Errors
    /// As [`KeyRing::seal`].
    pub fn make_data_key(&self, context: &SealContext<'_>) -> Result<(DataKey, Vec<u8>), EnvelopeError> {
        let key = Zeroizing::new(<[u8; KEY]>::generate());
        let sealed = self.seal(context, key.as_slice())?;
        Ok((DataKey(key), sealed))
    }

    /// The key that was stored at `context`.
    ///
    /// # Errors
    /// As [`KeyRing::open`].
    pub fn open_data_key(&self, context: &SealContext<'_>, sealed: &[u8]) -> Result<DataKey, EnvelopeError> {
        let key = self.open(context, sealed)?;
        let key = <[u8; KEY]>::try_from(key.expose_secret()).map_err(|_| EnvelopeError::Short)?;
        Ok(DataKey(Zeroizing::new(key)))
    }
}

impl DataKey {
    /// # Errors
    /// [`EnvelopeError::Refused`] where the part is longer than the cipher allows (64 GiB).
    pub fn seal(&self, context: &SealContext<'_>, plain: &[u8]) -> Result<Vec<u8>, EnvelopeError> {
        encrypt(&self.0, &context.associated_data(PART, ""), plain)
    }

    /// # Errors
    /// [`EnvelopeError::Refused`] where it was not sealed for this context by this key.
    pub fn open(&self, context: &SealContext<'_>, sealed: &[u8]) -> Result<SecretSlice<u8>, EnvelopeError> {
        let mut plain = decrypt(&self.0, &context.associated_data(PART, ""), sealed)?;
        Ok(SecretSlice::from(std::mem::take(&mut *plain)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY_CONTEXT: SealContext<'_> = SealContext { table: "recording", column: "key_enc", row: "1" };
    const PART_0: SealContext<'_> = SealContext { table: "recording_chunk", column: "frames_enc", row: "1/0" };

    #[test]
    fn part_opens_in_its_context_alone_and_after_a_rewrap_of_the_key() {
        let keys =
            "key a AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=\nkey b AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=\n";
        let (old, new) = (format!("{keys}active a"), format!("{keys}active b"));
        let (old, new) = (KeyRing::parse(&old).unwrap(), KeyRing::parse(&new).unwrap());
        let (key, kept) = old.make_data_key(&KEY_CONTEXT).unwrap();
        let part = key.seal(&PART_0, b"shown").unwrap();
        assert_ne!(part, key.seal(&PART_0, b"shown").unwrap());
        let rewrapped = new.open_data_key(&KEY_CONTEXT, &new.reseal(&KEY_CONTEXT, &kept).unwrap()).unwrap();
        assert_eq!(rewrapped.open(&PART_0, &part).unwrap().expose_secret(), b"shown");
        assert_eq!(rewrapped.open(&SealContext { row: "1/1", ..PART_0 }, &part).unwrap_err(), EnvelopeError::Refused);
        let (other, _) = old.make_data_key(&KEY_CONTEXT).unwrap();
        assert_eq!(other.open(&PART_0, &part).unwrap_err(), EnvelopeError::Refused);
    }
}
