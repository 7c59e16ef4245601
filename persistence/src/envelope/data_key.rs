//! A key for what is sealed in many parts: sealed itself as every other value is, so that another key of the key ring costs one value and
//! not all of the parts.

use super::{EnvelopeError, KEY, KeyRing, Place, decrypt, encrypt};
use aes_gcm::aead::Generate as _;
use secrecy::{ExposeSecret as _, SecretSlice};
use std::fmt;
use zeroize::Zeroizing;

const PART: u8 = b'p';

/// See the module. Each part is sealed under a nonce of chance, so at most 2^32 of them.
pub struct DataKey(Zeroizing<[u8; KEY]>);

impl fmt::Debug for DataKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DataKey(..)")
    }
}

impl KeyRing {
    /// A new key, and the same as it is to be kept at `place`.
    ///
    /// # Errors
    /// As [`KeyRing::seal`].
    pub fn make_data_key(&self, place: &Place<'_>) -> Result<(DataKey, Vec<u8>), EnvelopeError> {
        let key = Zeroizing::new(<[u8; KEY]>::generate());
        let sealed = self.seal(place, key.as_slice())?;
        Ok((DataKey(key), sealed))
    }

    /// The key that was kept at `place`.
    ///
    /// # Errors
    /// As [`KeyRing::open`].
    pub fn open_data_key(&self, place: &Place<'_>, sealed: &[u8]) -> Result<DataKey, EnvelopeError> {
        let key = self.open(place, sealed)?;
        let key = <[u8; KEY]>::try_from(key.expose_secret()).map_err(|_| EnvelopeError::Short)?;
        Ok(DataKey(Zeroizing::new(key)))
    }
}

impl DataKey {
    /// # Errors
    /// [`EnvelopeError::Refused`] where the part is longer than the cipher allows (64 GiB).
    pub fn seal(&self, place: &Place<'_>, plain: &[u8]) -> Result<Vec<u8>, EnvelopeError> {
        encrypt(&self.0, &place.associated_data(PART, ""), plain)
    }

    /// # Errors
    /// [`EnvelopeError::Refused`] where it was not sealed for this place by this key.
    pub fn open(&self, place: &Place<'_>, sealed: &[u8]) -> Result<SecretSlice<u8>, EnvelopeError> {
        let mut plain = decrypt(&self.0, &place.associated_data(PART, ""), sealed)?;
        Ok(SecretSlice::from(std::mem::take(&mut *plain)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const KEPT: Place<'_> = Place { table: "recording", column: "key_enc", row: "1" };
    const PART_0: Place<'_> = Place { table: "recording_chunk", column: "frames_enc", row: "1/0" };

    #[test]
    fn a_part_opens_in_its_place_alone_and_after_the_key_was_sealed_anew() {
        let keys =
            "key a AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=\nkey b AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=\n";
        let (old, new) = (format!("{keys}active a"), format!("{keys}active b"));
        let (old, new) = (KeyRing::parse(&old).unwrap(), KeyRing::parse(&new).unwrap());
        let (key, kept) = old.make_data_key(&KEPT).unwrap();
        let part = key.seal(&PART_0, b"shown").unwrap();
        assert_ne!(part, key.seal(&PART_0, b"shown").unwrap());
        let anew = new.open_data_key(&KEPT, &new.reseal(&KEPT, &kept).unwrap()).unwrap();
        assert_eq!(anew.open(&PART_0, &part).unwrap().expose_secret(), b"shown");
        assert_eq!(anew.open(&Place { row: "1/1", ..PART_0 }, &part).unwrap_err(), EnvelopeError::Refused);
        let (other, _) = old.make_data_key(&KEPT).unwrap();
        assert_eq!(other.open(&PART_0, &part).unwrap_err(), EnvelopeError::Refused);
    }
}
